"""IPR: branches from the expert's episodes, and pairs of the expert's and the policy's steps."""
