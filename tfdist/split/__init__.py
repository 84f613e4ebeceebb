"""A Keras model cut into stages on devices: its operations, what crosses a cut, and a step of training over them."""
