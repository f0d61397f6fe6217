"""Attention inside documents: the reference kernel and its registration with Transformers."""

from hf_wlb.attention.reference import attend_documents
from hf_wlb.attention.registration import check_isolation, document_attention_enabled, register

__all__ = ["attend_documents", "check_isolation", "document_attention_enabled", "register"]
