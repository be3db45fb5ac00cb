"""The screens of the console: what each page shows, made of what the reader holds."""
