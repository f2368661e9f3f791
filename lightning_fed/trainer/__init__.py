"""FederatedTrainer, its loop, and the parts of the loop."""
