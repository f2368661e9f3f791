"""Traces of tensor functions: graphs and passes over them, independent of clients and Lightning."""
