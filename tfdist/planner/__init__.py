"""Plans in plain values: where a model is cut, and what each stage does when. Numbers in, numbers out."""
