"""Environment `scienceworld`: elementary-science experiments in text, simulated in Java."""
