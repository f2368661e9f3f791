"""Ways to run a cohort; never a place for a method's formula."""
