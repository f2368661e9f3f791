"""Traces of functions of tensors: graphs, and passes over them; nothing of clients, nothing of Lightning."""
