"""The commands ``atoll plan`` and ``atoll simulate``, which print forecasts of :mod:`ops.forecast`."""
