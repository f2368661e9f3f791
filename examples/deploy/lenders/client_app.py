"""The app of a site. It names functions without importing them, since Flower imports this file for every message."""

from lightning_fed.deploy.flower import client_app

app = client_app("lenders.task:make_trainer", "lenders.task:make_model", "lenders.task:make_data")
