"""A script without a guard: its import trains."""

from own_tasks import build

trainer = build()
trainer.fit()
