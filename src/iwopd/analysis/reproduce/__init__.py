"""Every figure and table of the paper on the embedded world: `iwopd reproduce`."""
