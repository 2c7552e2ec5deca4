"""Remote calls: the codec, and what each caller may have under way."""
