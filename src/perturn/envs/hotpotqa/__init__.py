"""Environment `hotpotqa`: questions that are answered by searching a local index of paragraphs."""
