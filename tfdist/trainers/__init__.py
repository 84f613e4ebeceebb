"""What `strategy.distribute` mixes into a model, its optimizers and its losses."""
