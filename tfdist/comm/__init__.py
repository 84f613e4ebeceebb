"""Communication between ranks: collectives, packing of gradients, and the roll call that names missing ranks."""
