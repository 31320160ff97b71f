"""The notebook: magics, forms, widgets. The only room that knows Jupyter; it decides nothing."""
