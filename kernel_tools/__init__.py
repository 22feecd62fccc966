"""Train an object detector on a remote GPU without leaving the notebook."""
