"""``atoll plan`` and ``atoll simulate``: read files, print forecasts of :mod:`ops.forecast`."""
