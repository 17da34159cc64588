"""Which method at which site: what layers communicate, why something does not overlap, and what is measured as best."""
