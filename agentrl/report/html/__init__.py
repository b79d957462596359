"""Runs as a page of HTML: curves, rollouts token by token, evaluations, warnings."""

from agentrl.report.html.report import write_report

__all__ = ["write_report"]
