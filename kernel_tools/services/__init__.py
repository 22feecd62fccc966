"""Programs of ours on this machine (Jupyter server, object store): started once, shared, ended when nobody needs them."""
