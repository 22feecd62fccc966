"""Pictures and boxes, from a folder or a built-in set to batches on their way to the device.

    formats -> index -> augment -> samples -> loader
    toy (built-in sets) -> index; prepare writes one as a folder

`formats` reads what lies on disk and `toy` makes what does not; both end in one `DataIndex`. Nothing
behind the index knows where a picture came from.
"""
