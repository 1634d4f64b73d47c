"""How faithful blended answers are to full prefill's: arms, the bench that runs them, records, summary, outputs."""
