"""Delivery of alerts to the receivers that an operator names: webhooks, e-mail and chat."""
