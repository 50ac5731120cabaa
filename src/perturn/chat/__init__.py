"""Chat templates: messages -> text -> tokens, with a turn index for each token."""
