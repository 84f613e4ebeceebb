"""The strategies: what a script constructs, and what Keras calls."""
