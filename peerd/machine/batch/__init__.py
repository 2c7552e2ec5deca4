"""The batch under way: admission of microbatches, the ledger of what is done, and the forecast of its end."""
