"""Figures from scored completions: pass@k, its intervals, and the summary of an evaluation. No models here."""
