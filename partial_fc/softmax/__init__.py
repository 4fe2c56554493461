"""The sharded softmax: loss and gradients, chunk by chunk."""
