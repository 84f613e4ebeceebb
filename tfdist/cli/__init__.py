"""The `tfdist` command: one verb a file, loaded when it is used."""
