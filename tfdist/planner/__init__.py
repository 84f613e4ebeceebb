"""Plans in plain values: where a model is cut, what each stage does when, how long that takes. Numbers in and out."""
