"""Programs for people who work on headrace; none of them is part of the package."""
