"""Models by name (`build`), the weights they begin with, and their heads."""
