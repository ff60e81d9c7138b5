"""The shop's addresses."""

from django.contrib import admin
from django.urls import path

from shop import views

urlpatterns = [
    path("", views.order_list, name="orders"),
    path("orders/new/", views.order_new, name="order-new"),
    path("orders/<int:order_id>/", views.order_detail, name="order"),
    path("mails/", views.mail_list, name="mails"),
    path("mails/<str:name>/", views.mail_detail, name="mail"),
    path("healthz", views.healthz, name="healthz"),
    path("admin/", admin.site.urls),
]
