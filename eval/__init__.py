"""How faithful blended answers are and how fast they come: scoring, statistics, provenance and reports."""
