"""Two hospitals and a bank train one model on their own tables."""
