"""The ClientApp of a site: it hands Flower's messages to the site's resident process, and imports no PyTorch."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from lightning_fed.deploy.flower.records import clients_record, packed, unpacked
from lightning_fed.deploy.site_process import SiteProcess
from lightning_fed.deploy.site_worker import STARTED_BY, Maker, clients_of, end_with, named


def client_app(make_trainer: Maker, make_model: Maker, make_data: Maker) -> ClientApp:
    """Return the ClientApp of the sites of a run.

    The functions are called in the site's resident process, which stays from message to message. Give them by name:
    Flower starts an interpreter for every message, and a function itself would have it import PyTorch first.

    Args:
        make_trainer: Makes the server's trainer: ``"module:function"``, or a function. So are the others.
        make_model: Makes the module that the server has.
        make_data: Takes the node's configuration and makes a :class:`lightning_fed.FederatedDataModule` with the
            clients of this node, which ``client-id`` names.

    Raises:
        FederatedError: If another process cannot find one of them by name.

    Example::

        app = client_app(
            "hospital.task:make_trainer",
            "hospital.task:make_model",
            "hospital.task:make_data",
        )
    """
    given = {"trainer": make_trainer, "model": make_model, "data": make_data}
    makers = {what: named(f"make_{what}", maker) for what, maker in given.items()}
    app = ClientApp()

    @app.query()
    def say_who(message: Message, context: Context) -> Message:
        end_with(STARTED_BY)  # Flower's, and so with the SuperNode: else it would wait for it for ever
        return Message(clients_record(clients_of(context.node_config)), reply_to=message)

    @app.train()
    def work(message: Message, context: Context) -> Message:
        end_with(STARTED_BY)
        tasks, _ = unpacked(message.content)
        replies, refused = SiteProcess(makers, context.node_config).answer(tasks)
        return Message(packed(replies, refused), reply_to=message)

    return app
