"""What a run leaves: fetched here, read from the store, judged, compared, exported, put on the hub."""
