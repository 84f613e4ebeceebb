"""A job as files for Docker Compose and Kubernetes. Pure: values in, text out; nothing is started or written.

    wanted.py    what the user asked for, checked; its tasks
    compose.py   one service a task
    k8s.py       a TFJob or an MPIJob of Kubeflow
    ssh.py       the shell around horovodrun and sshd in both
    text.py      values as YAML, for people to read
"""
