"""Sensors: measure what rules and views need beyond the statistics of tensors, by the themes of `diagnosis.rules`.

A sensor declares which signals it produces, when it looks and what that costs (`sensor.Sensor`); the dispatcher
attaches it if one of its signals is wanted, and calls it at the moments it listens to.
"""
