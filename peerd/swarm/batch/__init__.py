"""The current batch: admission of microbatches, the ledger of what is done, and the forecast of its completion."""
