"""All-reduce over streaming calls."""
