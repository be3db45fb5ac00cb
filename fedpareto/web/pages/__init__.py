"""The look that the pages share: one skeleton and style sheet, figures made on the server, the words about a run."""
