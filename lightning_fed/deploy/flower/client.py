"""The ClientApp of a site: it passes Flower's messages to the site's resident process, without PyTorch."""

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from lightning_fed.deploy.site_process import STARTED_BY, Maker, SiteProcess, clients_of, end_with, names_of

_MESSAGES, _WHO, _CLIENTS = "messages", "who", "clients"
_FORMAT = "lightning_fed.deploy.Message"


def packed(messages: Mapping[str, bytes]) -> RecordDict:
    """Return the bytes of messages as a record, which Flower itself sends in pieces of 5 MB."""
    arrays = {key: Array("uint8", (len(content),), _FORMAT, content) for key, content in messages.items()}
    return RecordDict({_MESSAGES: ArrayRecord(arrays)})


def unpacked(record: RecordDict) -> dict[str, bytes]:
    """Return the messages of a record, none for a record with other content."""
    arrays = record.array_records.get(_MESSAGES) or ArrayRecord()
    return {str(key): array.data for key, array in arrays.items()}


def clients_in(record: RecordDict) -> list[str]:
    """Return the clients of a node, as text, from its answer to the query for its clients."""
    said = (record.config_records.get(_WHO) or ConfigRecord()).get(_CLIENTS)
    return [str(client) for client in said] if isinstance(said, list) else []


def client_app(make_trainer: Maker, make_model: Maker, make_data: Maker) -> ClientApp:
    """Return the ClientApp of the sites of a run.

    The functions are called in the site's resident process, which persists across messages. Give them by name: Flower
    starts an interpreter for every message, which would import PyTorch for a function object.

    Args:
        make_trainer: Makes the server's trainer: ``"module:function"`` or a function, like the others.
        make_model: Makes the server's module.
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
    makers = names_of(make_trainer, make_model, make_data)
    app = ClientApp()

    @app.query()
    def say_who(message: Message, context: Context) -> Message:
        end_with(STARTED_BY)  # Flower's process ends with the SuperNode; else this one would wait forever
        clients = [str(client) for client in clients_of(context.node_config)]
        return Message(RecordDict({_WHO: ConfigRecord({_CLIENTS: clients})}), reply_to=message)

    @app.train()
    def work(message: Message, context: Context) -> Message:
        end_with(STARTED_BY)
        answers = SiteProcess(makers, context.node_config).answer(unpacked(message.content))
        return Message(packed(answers), reply_to=message)

    return app
