"""All-reduce inside a stage, over streaming calls."""
