"""What tfdist is measured against, each written as its own users write it."""
