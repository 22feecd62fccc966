"""From a request to a live run: what is to run, from which weights, with which links, and the launch itself."""
