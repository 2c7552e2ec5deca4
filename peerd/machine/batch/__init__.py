"""The batch under way: who may add microbatches, what is done, and when it will be whole."""
