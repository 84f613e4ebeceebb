"""`tfdist doctor`: what is installed here, and what is wrong with it.

`facts` are plain values, `probe` gathers them (TensorFlow and Horovod in a process of their own),
`findings` (pure) judges them.
"""
