"""Generated from `proto/gradwire/v1/*.proto` by `make proto`. Do not edit."""
