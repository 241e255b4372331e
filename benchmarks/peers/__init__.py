"""Tandem and other servers under the same loads, in turn."""
