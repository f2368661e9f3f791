"""The app of the server."""

from lightning_fed.deploy.flower import server_app

CLIENTS = ["hospital-north", "hospital-south", "bank"]
app = server_app("lenders.task:make_trainer", "lenders.task:make_model", CLIENTS, "lenders.ckpt")
