"""Builds Horovod for the TensorFlow that is installed here, as no index has such a wheel.

`survey` looks at the machine, `plan` and `commands` (pure) say what to build and how, `job` does
it: `steps` fetch, patch, compile and install, `cache` keeps the wheels, `check` has two processes
sum a tensor. Nothing here imports TensorFlow or Horovod: both are only started in a process of
their own.
"""
