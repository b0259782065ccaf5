"""The one error that planning raises."""


class PlanError(ValueError):
    """A model, row capacity or SM count for which there is no plan; the message says what to change."""
